"""From weights to label maps: sliding windows, predictors, and restoration of the file's grid."""
