"""Brain tumour segmentation in multi-channel MRI (MSD Task01), and any multi-channel dataset in its layout."""
