"""The networks: the recurrent loop and its parts, an encoder around it, MONAI decoder blocks on top.

Shape suffixes in this folder: B batch, N tokens, M tokens that are still computed, D width, H heads, K head width,
E experts, T loops, C image channels. Images are (B, C, X, Y) or (B, C, X, Y, Z). Nothing here reads or writes files.
"""
