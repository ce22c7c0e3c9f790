"""Properties of what the parts of a lost rank are taken for: only for what the rank is known to have had."""

from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from undula.recovery.baseline import LATER, UPDATED, WORK, Work, bit_of
from undula.recovery.offers import Answer, Content, Offer
from undula.recovery.update_log import BEFORE, OTHERS, PlaceFile, ScriptPlace
from undula.recovery.worker_state import HeldState
from undula.state.optimizer_state import GROUPS
from undula.state.pieces import Piece, RankState

SHARD, BUFFER = "model.weight", "model.buffer"
PIECES = {SHARD: Piece(torch.zeros(1), (2,), (0,), is_replicated=False), BUFFER: Piece(torch.zeros(1), (1,), (0,))}


def until(changes: int, place: int) -> int:
    """Return those changes, as bits, that are at a place or before it."""
    return changes & sum(map(bit_of, range(1, place + 1)))


def state(step: int, work: Work, **values: Any) -> HeldState:
    return HeldState("plan", 1, step, RankState(PIECES, {WORK: [work.place, work.changes, 0], **values}), ())


def update(before: int, changes: int) -> HeldState:
    """Return the record of an update, before which a rank has found these changes."""
    names = {GROUPS: [{"parameters": ["weight"]}], OTHERS: []}
    return state(before + 1, Work(LATER, changes), **{BEFORE: before, **names})


@st.composite
def lost_ranks(draw: st.DrawFn) -> tuple[Offer, int, int, int]:
    """Return what a lost rank leaves, and how it was after 8 steps: the place of its pieces, the last one that it reached, and its changes.

    It leaves a snapshot of that step, or an older one with the update that leads to that step.
    """
    changes, reached = draw(st.integers(0, 7)), draw(st.integers(UPDATED, LATER))
    changes = until(changes, reached)
    held = draw(st.integers(UPDATED, reached))
    noted = draw(st.none() | st.integers(UPDATED, reached))
    last = (
        None if noted is None else ScriptPlace(draw(st.sampled_from([8, 8, 8, 7])), Work(noted, until(changes, noted)))
    )
    updates = [update(8, changes)] if reached == LATER and draw(st.booleans()) else []
    if draw(st.booleans()):
        return Offer.of(state(8, Work(held, until(changes, held))), updates, last), held, reached, changes
    return Offer.of(state(7, Work(LATER)), [update(7, 0), *updates], last), UPDATED, reached, changes


@given(lost_ranks())
def test_pieces_are_taken_only_for_places_at_which_the_rank_had_them(drawn: tuple[Offer, int, int, int]) -> None:
    offer, held, reached, changes = drawn
    answers = [answer for answer in offer.answers() if answer.age == (1, 8)]
    assert answers
    for answer in answers:
        places = [place for place in range(UPDATED, LATER + 1) if answer.is_of(place)]
        assert all(place <= reached and until(changes, place) == until(changes, held) for place in places)


@given(lost_ranks())
def test_buffers_and_values_are_those_of_one_place(drawn: tuple[Offer, int, int, int]) -> None:
    for answer in drawn[0].answers():
        assert answer.holding is not None
        is_state = answer.content == Content.STATE
        assert (BUFFER in answer.holding.boxes) == is_state
        assert not is_state or answer.first == answer.last


def test_a_rank_that_has_noted_its_place_offers_its_update_for_it(tmp_path: Path) -> None:
    places = PlaceFile(tmp_path)
    places.note(7, Work(2, 3))
    places.note(8, Work(2, 2))
    assert ScriptPlace.noted_in(tmp_path) == ScriptPlace(8, Work(2, 2))
    offer = Offer.of(state(7, Work(LATER)), [update(7, 0)], ScriptPlace.noted_in(tmp_path))
    replayed = [answer for answer in offer.answers() if answer.content == Content.REPLAYED]
    assert replayed == [Answer((1, 8), replayed[0].holding, replayed[0].origin, UPDATED, 1, Content.REPLAYED)]


def test_no_place_is_noted_before_there_is_a_folder_for_snapshots(tmp_path: Path) -> None:
    PlaceFile(tmp_path / "own").note(8, Work(2, 0))
    assert ScriptPlace.noted_in(tmp_path / "own") is None
    assert ScriptPlace.noted_in(None) is None
