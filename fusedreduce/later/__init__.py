"""Steps that do not end with their own backward: launched ones that a caller completes, averages that come later."""
