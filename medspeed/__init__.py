"""Medical image segmentation and slide detection, from raw scans to checked engines; see the README."""
