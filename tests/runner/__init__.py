"""Tests of which cases run in which worlds, and what is kept between them."""
