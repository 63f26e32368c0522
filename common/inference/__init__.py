"""From weights to a mask: sliding windows, predictors, the way back to the file's grid."""
