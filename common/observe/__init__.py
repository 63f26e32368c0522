"""What a run writes about itself: folder, clock, curves, overlays, summary."""
