"""From files to batches: volumes, geometry, cases, store, cache, crops."""
