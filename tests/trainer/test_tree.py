"""The token tree on literal ids: where edges begin, what is stored, and that arrival order decides nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rllm_trainer.tree import SharedPrefixes, TokenTree, TreeBuilder, shared_length


def ids(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def tree_of(*calls: tuple[int, list[int], list[list[int]]], lineage: str = "") -> TokenTree:
    builder = TreeBuilder()
    for key, prompt, replies in calls:
        builder.place(key, ids(*prompt), [ids(*reply) for reply in replies], lineage=lineage)
    return builder.finish()


def edges(tree: TokenTree) -> list[list[int]]:
    return [tree.tokens[tree.offsets[n] : tree.offsets[n + 1]].tolist() for n in range(len(tree.parents))]


def test_an_edge_holds_what_a_call_adds_to_the_longest_recorded_prefix() -> None:
    """A chain of two calls is prompt, reply, observation, reply: four edges below the root."""
    tree = tree_of((0, [5, 6], [[7, 2]]), (1, [5, 6, 7, 2, 8], [[9, 2]]))
    assert edges(tree) == [[], [5, 6], [7, 2], [8], [9, 2]]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]
    assert tree.depths.tolist() == [0, 2, 4, 5, 7]
    assert tree.prompt_ends.tolist() == [1, 3]
    assert tree.reply_ends.tolist() == [2, 4]


def test_an_edge_is_cut_where_two_prompts_part() -> None:
    """Two prompts that share three tokens store them once."""
    tree = tree_of((0, [1, 2, 3, 4], [[5]]), (1, [1, 2, 3, 9], [[5]]))
    assert edges(tree) == [[], [1, 2, 3], [4], [5], [9], [5]]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 1, 4]


def test_a_prompt_that_ends_inside_an_edge_cuts_it() -> None:
    """A conversation taken back to its beginning adds no token."""
    tree = tree_of((0, [1, 2, 3, 4], []), (1, [1, 2], []))
    assert edges(tree) == [[], [1, 2], [3, 4]]
    assert tree.prompt_ends.tolist() == [2, 1]


def test_equal_replies_end_at_one_node_and_stay_two_replies() -> None:
    """n=3 with two equal samples: two nodes, three replies."""
    tree = tree_of((0, [1], [[4, 2], [5, 2], [4, 2]]))
    assert edges(tree) == [[], [1], [4, 2], [5, 2]]
    assert tree.reply_calls.tolist() == [0, 0, 0]
    assert tree.reply_ends.tolist() == [2, 3, 2]


def test_a_reply_without_tokens_ends_where_its_prompt_ends() -> None:
    """An empty reply adds nothing."""
    tree = tree_of((0, [1, 2], [[]]))
    assert edges(tree) == [[], [1, 2]]
    assert tree.reply_ends.tolist() == tree.prompt_ends.tolist() == [1]


def test_arrival_order_decides_nothing() -> None:
    """Every order in which these four calls can arrive gives the same arrays."""
    calls = [(0, [1, 2], [[3, 4]]), (1, [1, 2, 3, 4, 5], [[6], [7]]), (2, [1, 2, 3, 9], [[6]]), (3, [1, 2], [[3]])]
    expected = tree_of(*calls)
    assert edges(expected) == [[], [1, 2], [3], [4], [5], [6], [7], [9], [6]]
    for order in itertools.permutations(calls):
        tree = tree_of(*order)
        assert edges(tree) == edges(expected)
        assert tree.prompt_ends.tolist() == [1, 4, 7, 1]
        assert tree.reply_ends.tolist() == [3, 5, 6, 8, 2]


def test_a_path_is_read_back_whole_and_in_windows() -> None:
    """A path's tokens come from several edges, and a window cuts the first and the last of them."""
    tree = tree_of((0, [5, 6], [[7, 2]]), (1, [5, 6, 7, 2, 8], [[9, 2]]), (2, [5, 6, 7, 1], [[3]]))
    assert tree.path(int(tree.reply_ends[1])).tolist() == [5, 6, 7, 2, 8, 9, 2]
    assert tree.path(int(tree.reply_ends[1]), 1, 6).tolist() == [6, 7, 2, 8, 9]
    assert tree.path(int(tree.reply_ends[2])).tolist() == [5, 6, 7, 1, 3]
    assert tree.path(int(tree.reply_ends[2]), 3, 4).tolist() == [1]
    assert tree.path(0).tolist() == []


def test_the_largest_child_comes_first() -> None:
    """It lies directly after its parent, so that the longer path is one run; equally large children go by their first token."""
    tree = tree_of((0, [1], [[5], [9], [2]]), (1, [1, 9, 8], [[7]]))
    assert edges(tree) == [[], [1], [9], [8], [7], [2], [5]]
    assert tree.tops.tolist() == [0, 0, 0, 0, 0, 5, 6]


def test_shared_prefixes_of_equal_sequences() -> None:
    """Two equal samples share all of their tokens, and with a third as many as it has in common."""
    prefixes = SharedPrefixes(tree_of((0, [1, 2], [[3, 4], [3, 9], [3, 4]])))
    assert prefixes.of(0).tolist() == [4, 3, 4]
    assert prefixes.of(1).tolist() == [3, 4, 3]
    assert prefixes.of(2).tolist() == [4, 3, 4]


def test_shared_prefixes_count_tokens_of_whole_sequences() -> None:
    """[1 2 3 4], [1 2 3 9 6], [1 2 3] and [8] share 3, 3 and 0 tokens with the first."""
    tree = tree_of((0, [1, 2], [[3, 4]]), (1, [1, 2, 3, 9], [[6]]), (2, [1, 2], [[3]]), (3, [8], [[]]))
    prefixes = SharedPrefixes(tree)
    assert prefixes.of(0).tolist() == [4, 3, 3, 0]
    assert prefixes.of(1).tolist() == [3, 5, 3, 0]
    assert prefixes.of(2).tolist() == [3, 3, 3, 0]
    assert prefixes.of(3).tolist() == [0, 0, 0, 1]


def test_a_long_lost_lineage_is_found_again_by_hash() -> None:
    """Lineages that take turns under one name extend their own recorded ends: 3 lineages of 3 turns make 1 + 3 * 6 nodes."""
    builder = TreeBuilder()
    histories = [[100 + lineage] for lineage in range(3)]
    for turn in range(3):
        for lineage, history in enumerate(histories):
            builder.place((turn, lineage), ids(*history), [ids(7, 2)], lineage="same")
            history += [7, 2, 50 + turn]
    tree = builder.finish()
    assert len(tree.parents) == 1 + 3 * 6
    assert len(tree.tokens) == 3 * (3 * 3)


@pytest.mark.parametrize("lineages", [("same", "same"), ("one", "other")])
def test_a_long_prompt_that_differs_at_its_beginning_continues_nothing(lineages: tuple[str, str]) -> None:
    """600 equal tokens after another first one are stored again, and both prompts are read back as they were."""
    same = [5] * 600
    builder = TreeBuilder()
    builder.place(0, ids(1, *same), [ids(7)], lineage=lineages[0])
    builder.place(1, ids(2, *same, 7), [ids(8)], lineage=lineages[1])
    tree = builder.finish()
    assert tree.path(int(tree.reply_ends[0])).tolist() == [1, *same, 7]
    assert tree.path(int(tree.reply_ends[1])).tolist() == [2, *same, 7, 8]
    assert len(tree.tokens) == 602 + 603


def test_equal_hashes_of_other_tokens_are_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a hash that does not see the order of tokens, [3 1] is not taken for a beginning of [1 3 4]."""
    monkeypatch.setattr("rllm_trainer.tree._weights_for", lambda length: np.ones(length, np.uint64))
    builder = TreeBuilder()
    builder.place(0, ids(3, 1), [ids(2)], lineage="one")
    builder.place(1, ids(1, 3, 4), [ids(2)], lineage="other")
    builder.place(2, ids(3, 1, 2, 9), [ids(6)], lineage="third")
    tree = builder.finish()
    assert [tree.path(int(end)).tolist() for end in tree.reply_ends] == [[3, 1, 2], [1, 3, 4, 2], [3, 1, 2, 9, 6]]


@pytest.mark.parametrize(
    "left, right, length",
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [5], 0)],
)
def test_shared_length(left: list[int], right: list[int], length: int) -> None:
    """The number of leading tokens that two sequences share."""
    assert shared_length(ids(*left), ids(*right)) == length


def test_shared_length_over_many_blocks() -> None:
    """The first difference is found wherever it lies in a long sequence."""
    left = np.zeros(100_000, np.int32)
    for at in (0, 255, 256, 1279, 1280, 99_999):
        right = left.copy()
        right[at] = 1
        assert shared_length(left, right) == at


def test_the_tree_keeps_no_array_that_it_was_given() -> None:
    """What a call came as may change after ``finish``."""
    prompt, reply = ids(5, 6), ids(7, 2)
    builder = TreeBuilder()
    builder.place(0, prompt, [reply])
    tree = builder.finish()
    prompt[:] = 0
    reply[:] = 0
    assert tree.tokens.tolist() == [5, 6, 7, 2]


def test_a_tree_without_calls() -> None:
    """An episode without calls is a root."""
    tree = TreeBuilder().finish()
    assert edges(tree) == [[]]
    assert tree.prompt_ends.tolist() == tree.reply_ends.tolist() == []
