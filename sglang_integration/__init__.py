"""SGLang plugin: whole decode steps behind `--enable-nvidia-megakernel`, single KDA ops behind
`--linear-attn-decode-backend kimi_triton`. Importing needs neither SGLang nor torch."""
