"""The SGLang plugin that will put the megakernel to work. Empty yet: this package holds its place in the layout."""
