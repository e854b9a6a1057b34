"""Pieces of parameters: the elements of a tensor that belong to this rank."""

from __future__ import annotations

import torch

from shardproof.engine.pieces import Piece


def test_a_number_that_another_rank_owns_is_an_empty_piece() -> None:
    number = torch.tensor(2.0)
    assert not Piece(name="gain", shape=(), owner=number, numel=0).of(number).tensor.numel()


def test_a_number_of_this_rank_is_whole() -> None:
    number = torch.tensor(2.0)
    shown = Piece(name="gain", shape=(), owner=number).of(number)
    assert shown.is_whole
    assert shown.tensor.item() == 2


def test_a_number_beside_a_piece_is_of_the_whole_parameter() -> None:
    count = torch.tensor(7.0)
    assert Piece(name="weight", shape=(4,), owner=torch.zeros(0), numel=0).of(count).tensor.item() == 7
