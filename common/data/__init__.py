"""From a file to a batch: volumes, geometry, cases, store, cache, crops."""
