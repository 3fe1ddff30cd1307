"""What serves training and no compression: `pk.gradients` and `pk.loops`.

- `gradients`: gradients of unmodified models
- `loops`: training loops, caches, accumulation
"""
