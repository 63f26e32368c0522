"""Tumour detection in whole-slide images (Camelyon16), and any slides with a mask or outlines of lesions."""
