"""What a run did in, lines for a person out. The only file that prints.

Everything that was dropped, failed, masked or tried again appears at the end of its step, with its reason and number. Without
``progress`` only warnings are printed, to stderr. Standard output and error are never redirected.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from rllm_trace.routing import CallSite
from rllm_trainer.config import SettingRow
from rllm_trainer.intervals import Interval
from rllm_trainer.metrics import EVAL_GREEDY, EVAL_NLL, EVAL_SAMPLED, GAP_MEAN, REWARD_MEAN, Line
from rllm_trainer.rollout.attempt import Job
from rllm_trainer.samples import Counters
from rllm_trainer.trainability_report import TrainabilityReport
from rllm_trainer.types import Rollout

__all__ = ["Losses", "Report", "losses_of"]

_SHOWN_REASONS = 4
_LONGEST_REASON = 200


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did not train, and why."""

    faults: dict[str, int] = {}
    """Whose fault -> rollouts."""
    reasons: dict[str, int] = {}
    """Sentence -> rollouts."""
    tokens: dict[str, int] = {}
    """Reason -> sampled tokens that are not trained."""
    breaks: dict[str, int] = {}
    """Cause -> prompts that started a new row."""
    notes: list[str] = []
    """Further sentences: retries, groups without signal, extra episodes."""
    examples: dict[str, str] = {}
    """Reason or cause -> one case of it."""


class Report:
    """Prints, and keeps the warnings for the result."""

    def __init__(self, *, progress: bool = True) -> None:
        from rich.console import Console

        self.warnings: list[str] = []
        self._progress = progress
        self._exemplified: set[str] = set()
        """Reasons and causes of which a case has been shown."""
        self._out: Any = cast("Any", Console)(soft_wrap=True, highlight=False)
        self._err: Any = cast("Any", Console)(soft_wrap=True, highlight=False, stderr=True)

    def settings(self, rows: Sequence[SettingRow], facts: Mapping[str, str]) -> None:
        """The table of a run: what it is about, then every setting, those given marked."""
        if not self._progress:
            return
        table = _table("setting", "value", "")
        for name, value in facts.items():
            table.add_row(f"[bold]{_plain(name)}[/]", _plain(value), "")
        for row in rows:
            table.add_row(row.name, _plain(row.value), "given" if row.given else "[dim]default[/]")
        self._out.print(table)

    def explained(self, rows: Sequence[SettingRow], docs: Mapping[str, str]) -> None:
        """Settings with their defaults and what each does."""
        table = _table("setting", "default", "what it does")
        for row in rows:
            table.add_row(row.name, _plain(row.value), _plain(docs[row.name]))
        self._out.print(table)

    def note(self, sentence: str) -> None:
        """One line."""
        if self._progress:
            self._out.print(_plain(sentence))

    def warn(self, sentence: str) -> None:
        """One line that is printed in any case, and kept."""
        self.warnings.append(sentence)
        self._err.print(f"[yellow]warning:[/] {_plain(sentence)}")

    def failed(self, sentence: str) -> None:
        """What ended a command."""
        self._err.print(f"[red]{_plain(sentence)}[/]")

    def routing(self, sites: Sequence[CallSite]) -> None:
        """Which model name goes where, and whether it is trained."""
        if not self._progress:
            return
        table = _table("model that the app asks for", "goes to", "trained", "calls")
        for site in sites:
            goes = "policy" if site.endpoint == "policy" else "its own endpoint"
            table.add_row(_plain(site.model), goes, "yes" if site.trained else "no", str(site.calls))
        self._out.print(table)

    def step(self, line: Line, losses: Losses, *, steps: int | None) -> None:
        """One step, and what it lost."""
        if not self._progress:
            return
        parts = [f"[bold]step {line['step']:.0f}{f'/{steps}' if steps else ''}[/]"]
        parts += [words.format(line[name]) for name, words in _STEP_WORDS if name in line]
        self._out.print("  ".join(parts))
        for sentence in _loss_lines(losses):
            self._out.print(f"    {_plain(sentence)}", style="dim")
        for name, example in losses.examples.items():
            if name not in self._exemplified:
                self._exemplified.add(name)
                self._out.print(f"      {_plain(name)}, such as {_plain(example)}", style="dim")

    def trainability(self, found: TrainabilityReport, *, since: int = 0) -> None:
        """What became of the calls and tokens of the run; of one that went on, from the step after ``since``."""
        counters = found.counters
        if not counters.episodes:
            return
        since_when = f" since step {since}" if since else ""
        tokens = f"{counters.trained_tokens} of {counters.sampled_tokens} sampled tokens ({counters.share_trained:.1%})"
        self.note(
            f"trainability{since_when}: {tokens} could be trained, in {counters.rows} rows of {counters.episodes} episodes; "
            f"{counters.multi_call_episodes} episodes made two or more calls, and {counters.one_row_episodes} of them are one row"
        )
        rows = found.table()
        if rows and self._progress:
            table = _table("", "cause", "count", "tokens", "such as")
            for what, cause, count, tokens, example in rows:
                table.add_row(what, _plain(cause), str(count), str(tokens), _plain(_short(example)))
            self._out.print(table)

    def evaluation(self, when: str, sampled: Interval, greedy: Interval | None, failures: Mapping[str, int]) -> None:
        """One evaluation."""
        failed = f"  failures, counted as 0: {_counted(failures)}" if failures else ""
        shown = f"sampled {sampled}" + (f"  greedy {greedy}" if greedy is not None else "")
        self.note(f"held-out reward {when}: {shown}{failed}")

    def hung(self, job: Job, reason: str, stack: str) -> None:
        """A rollout that was given up, and where it is."""
        where = f"\n{stack.rstrip()}" if stack else ""
        self.warn(f"rollout {job.index} of task {job.task_id} was given up: {reason}{where}")

    @contextmanager
    def batch(self, what: str, total: int) -> Generator[Callable[[Rollout], None]]:
        """A bar on a terminal while rollouts run; gives what to call for each that has ended."""
        if not (self._progress and self._out.is_terminal):
            yield lambda _: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        bar: Any = cast("Any", Progress)(*columns, console=self._out, transient=True, redirect_stdout=False, redirect_stderr=False)
        with bar:
            task = bar.add_task(what, total=total)
            yield lambda _: bar.advance(task)

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """Says what takes a while, and how long it took."""
        started = time.monotonic()
        yield
        self.note(f"{what}: {time.monotonic() - started:.1f} s")


_STEP_WORDS: tuple[tuple[str, str], ...] = (
    (REWARD_MEAN, "reward {:.3f}"),
    ("reward/std", "± {:.3f}"),
    ("groups/with_signal_share", "groups with signal {:.0%}"),
    ("tokens_per_second", "{:.0f} tokens/s"),
    ("tokens/trained", "trained tokens {:.0f}"),
    ("loss", "loss {:.4f}"),
    ("grad_norm", "grad norm {:.3f}"),
    (GAP_MEAN, "logprob gap {:.1e}"),
    ("swap/seconds", "swap {:.2f} s"),
    ("seconds", "{:.1f} s"),
    (EVAL_SAMPLED, "held-out {:.3f}"),
    (EVAL_GREEDY, "greedy {:.3f}"),
    (EVAL_NLL, "held-out loss {:.4f}"),
)


def losses_of(rollouts: Sequence[Rollout], counters: Counters, notes: Sequence[str], found: TrainabilityReport | None = None) -> Losses:
    """What a batch lost, counted; ``found`` has examples."""
    failed = [r for r in rollouts if r.fault is not None]
    return Losses(
        faults=dict(Counter(str(r.fault) for r in failed)),
        reasons=dict(Counter(r.reason or "no reason was recorded" for r in failed)),
        tokens=counters.lost_tokens,
        breaks=counters.breaks,
        notes=list(notes),
        examples={} if found is None else {cause: _short(example) for _, cause, _, _, example in found.table()},
    )


def _loss_lines(losses: Losses) -> list[str]:
    lines: list[str] = []
    if losses.faults:
        lines.append(f"failed rollouts by fault: {_counted(losses.faults)}")
        lines += [f"  {count} × {_short(reason)}" for reason, count in Counter(losses.reasons).most_common(_SHOWN_REASONS)]
        hidden = len(losses.reasons) - _SHOWN_REASONS
        if hidden > 0:
            lines.append(f"  and {hidden} further reasons, in rollouts.jsonl")
    if losses.tokens:
        lines.append(f"sampled tokens not trained: {_counted(losses.tokens)}")
    if losses.breaks:
        lines.append(f"prompts that started a new row: {_counted(losses.breaks)}")
    return lines + losses.notes


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in Counter(counts).most_common())


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _table(*headers: str) -> Any:
    from rich import box
    from rich.table import Column, Table

    columns = [cast("Any", Column)(header, overflow="fold") for header in headers]
    return cast("Any", Table)(*columns, box=box.SIMPLE, show_edge=False)
