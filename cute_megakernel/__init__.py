"""The decode step as one persistent CuTe DSL launch. No stages yet: this package holds its place in the layout."""
