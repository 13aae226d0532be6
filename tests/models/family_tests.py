"""The tests that every family has to pass, on files that it says how to make; knows no architecture.

A family's test module has a class `Test…` of FamilyTests and of what else concerns it below. What each check does is in
parity.py and refusals.py.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, ClassVar

from family_file import FamilyFile, FamilyModel
from parity import (
    assert_parity,
    assert_prerouted,
    assert_rerouted,
    assert_sessions_start_afresh,
    assert_skipped_tensors_change_nothing,
    assert_streamed_is_resident,
    batch_parity,
    greedy_pair,
    logits_parity,
    long_parity,
    weight_of_tensors,
)
from refusals import assert_spoilt_metadata_is_refused, assert_spoilt_tensors_are_refused, problem

Options = dict[str, Any]  # of `make`


class FamilyTests:
    """Logits, tokens, streaming and sessions. `float32`, `quantised` and `streamed` are names in the tables below."""

    FLOAT32: ClassVar[dict[str, Options]]
    QUANTISED: ClassVar[dict[str, Options]]
    STREAMED: ClassVar[tuple[str, ...] | None] = None  # of QUANTISED; None: all
    STREAMED_MORE: ClassVar[Options] = {}
    STREAMED_KV: ClassVar[dict[str, str]] = {}  # f16 where it says nothing
    GREEDY: ClassVar[Options] = {}
    AFRESH: ClassVar[str] = "Q8_0"  # of QUANTISED
    MATTERS: ClassVar[float] = 0.02  # relative L2 by which the logits change at least when a tensor is zeros

    @staticmethod
    def make(**options: Any) -> FamilyFile:
        """A file of the family."""
        raise NotImplementedError

    def small(self) -> FamilyFile:
        """A file with as little as has every kind of tensor and key."""
        raise NotImplementedError

    def weighed(self) -> FamilyFile:
        """A file whose every tensor should matter."""
        return self.small()

    def written(self, folder: Path, options: Options) -> FamilyModel:
        """The file of `options`, in two shards."""
        return self.make(**options).write(folder / "m.gguf", split=2)

    def test_float32_agrees_with_llamacpp(self, tmp_path: Path, float32: str) -> None:
        model = self.written(tmp_path, self.FLOAT32[float32])
        assert_parity([*logits_parity(model, float32=True), batch_parity(model, float32=True)], float32=True)

    def test_quantised_agrees_with_llamacpp(self, tmp_path: Path, quantised: str) -> None:
        model = self.written(tmp_path, self.QUANTISED[quantised])
        assert_parity([*logits_parity(model, float32=False), batch_parity(model, float32=False)], float32=False)

    def test_greedy_tokens_are_those_of_llamacpp(self, tmp_path: Path) -> None:
        ours, theirs = greedy_pair(self.written(tmp_path, self.GREEDY))
        assert ours == theirs and len(set(ours)) > 8

    def test_streamed_bits_are_the_resident_ones(self, tmp_path: Path, streamed: str) -> None:
        model = self.written(tmp_path, self.QUANTISED[streamed] | self.STREAMED_MORE)
        assert_streamed_is_resident(model, kv=self.STREAMED_KV.get(streamed, "f16"))

    def test_nothing_of_a_request_is_left_for_the_next(self, tmp_path: Path) -> None:
        assert_sessions_start_afresh(self.written(tmp_path, self.QUANTISED[self.AFRESH]))

    def test_routes_known_ahead(self, tmp_path: Path) -> None:
        assert_prerouted(self.written(tmp_path, self.QUANTISED[self.AFRESH]))

    def test_routes_give_way(self, tmp_path: Path) -> None:
        assert_rerouted(self.written(tmp_path, self.QUANTISED[self.AFRESH]))

    def test_every_tensor_matters(self, tmp_path: Path) -> None:
        changes = weight_of_tensors(self.weighed(), tmp_path)
        assert all(change > self.MATTERS for change in changes.values()), changes


class LongContextTests(FamilyTests):
    """Of families with windows, yarn or states."""

    LONG: ClassVar[Options]

    def test_long_context_agrees_with_llamacpp(self, tmp_path: Path) -> None:
        assert_parity([long_parity(self.written(tmp_path, self.LONG))], float32=True)


class SkippedBlockTests(FamilyTests):
    """Of families whose files may have a block for multi-token prediction: `make` takes `mtp`.

    The files of `small` and `weighed` have two layers and that block.
    """

    SKIPPED: ClassVar[str] = "blk.2."

    def test_the_block_for_the_token_after_the_next_changes_nothing(self, tmp_path: Path) -> None:
        model, without = (self.make(mtp=mtp).write(tmp_path / f"{mtp}.gguf") for mtp in (True, False))
        assert_skipped_tensors_change_nothing(model, without)

    def test_every_tensor_matters(self, tmp_path: Path) -> None:
        self.assert_all_but_the_skipped_matter(self.weighed(), tmp_path)

    def assert_all_but_the_skipped_matter(self, file: FamilyFile, folder: Path) -> None:
        changes = weight_of_tensors(file, folder)
        unseen = {name for name, change in changes.items() if change == 0.0}
        assert unseen == {name for name in changes if name.startswith(self.SKIPPED)}
        assert all(change > self.MATTERS for change in changes.values() if change > 0), changes


class RefusalTests(FamilyTests):
    """Spoilt tensors and keys are refused by name. `OPTIONAL` keys have defaults that are this file's values, or any
    would do."""

    OPTIONAL: ClassVar[AbstractSet[str]]

    def small_for_keys(self) -> FamilyFile:
        """The file whose keys are spoilt, where it isn't that whose tensors are."""
        return self.small()

    def may_lack(self, name: str) -> bool:
        """Whether a file can do without a tensor."""
        return name == "output.weight"

    def skips(self, name: str) -> bool:
        """Whether nobody looks at a tensor."""
        return isinstance(self, SkippedBlockTests) and name.startswith(self.SKIPPED)

    def test_a_tensor_that_is_missing_misshapen_or_unknown_is_named(self, tmp_path: Path) -> None:
        assert_spoilt_tensors_are_refused(self.small, tmp_path, may_lack=self.may_lack, skipped=self.skips)

    def test_metadata_that_is_missing_or_disagrees_with_the_tensors_is_refused(self, tmp_path: Path) -> None:
        assert_spoilt_metadata_is_refused(self.small_for_keys, tmp_path, optional=self.OPTIONAL)


class ContradictionTests(FamilyTests):
    """Keys with values that contradict others, or mean nothing, each with a part of what is said of them."""

    CONTRADICTIONS: ClassVar[list[tuple[Options, str]]]

    def test_contradictions_are_refused(self, tmp_path: Path, contradiction: tuple[Options, str]) -> None:
        keys, complaint = contradiction
        file = self.make()
        file.metadata(keys)
        assert complaint in (problem(file.write(tmp_path / "m.gguf").path) or "opens")
