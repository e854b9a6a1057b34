"""Tests of the contract, plans and adapters."""
