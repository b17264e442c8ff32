"""Carry the series of one vLLM to another: ``ci/rebase.sh``.

``target`` says what the series is carried to, ``plan`` which patches and in what order, ``carry`` merges one,
``resolutions`` keeps what a person decided, ``bench`` runs the contracts, ``engine`` does it all in order,
``publish`` writes the result, ``report`` tells of it.
"""
