"""The part in C++, `torch_ltc._native`: an optional extension that does quicker what the package does without it.

`compiler` compiles it, `library` finds and loads it. Nothing is compiled at import: `ltc build` does it.
"""
