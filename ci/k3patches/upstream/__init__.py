"""Upstream's own tests on the pristine and on the patched tree.  :mod:`.select` and :mod:`.sides` need nothing
but Python, so that tests/gpu/upstream.py can use them beside an installed vLLM."""
