"""Writes the README's file tree, one line for each file, from the first sentence of each file: ``python tools/file_tree.py``.

With ``--check`` it writes nothing and exits with 1 where the tree is out of date.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
START, END = "<!-- file tree: tools/file_tree.py -->", "<!-- end of the file tree -->"
FOLDERS = ["rllm_trace", "rllm_trainer", "examples", "benchmarks", "tools"]
WIDTH = 150


def tree() -> str:
    """The tree as a code block."""
    lines = ["```"]
    for folder in FOLDERS:
        lines += branch(ROOT / folder, 0)
    return "\n".join([*lines, "```"])


def branch(folder: Path, depth: int) -> list[str]:
    """A folder's line, and one for each Python file below it; a file without a docstring has its name alone."""
    files = sorted(path for path in folder.iterdir() if path.suffix == ".py")
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.rglob("*.py")) and path.name != "__pycache__")
    about = sentence(folder / "__init__.py") if (folder / "__init__.py") in files else ""
    lines = [line(f"{'  ' * depth}{folder.name}/", about)]
    lines += [line(f"{'  ' * (depth + 1)}{path.name}", sentence(path)) for path in files if path.name != "__init__.py"]
    return lines + [text for sub in folders for text in branch(sub, depth + 1)]


def line(name: str, about: str) -> str:
    text = f"{name:<34} {about}".rstrip()
    return text if len(text) <= WIDTH else text[: WIDTH - 1].rsplit(" ", 1)[0].rstrip(",;:") + " …"


def sentence(path: Path) -> str:
    """The first sentence of a file's docstring, without what it says about its use."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=[.])\s|\n\n", text, maxsplit=1)[0].replace("\n", " ").replace("``", "`")
    return first.removesuffix(".")


def main() -> int:
    """Exit status: 1 where ``--check`` finds the tree out of date."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(START, 1)
    now = f"{before}{START}\n{tree()}\n{END}{rest.split(END, 1)[1]}"
    if "--check" in sys.argv:
        if now != text:
            print("the README's file tree is out of date; run: python tools/file_tree.py")
        return int(now != text)
    README.write_text(now, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
