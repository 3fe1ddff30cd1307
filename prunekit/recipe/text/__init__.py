"""Recipe files.

- `yaml_reader`: plain values with their positions
- `loader`: a recipe from file, mapping or name
- `presence`: files that a recipe names exist
- `factories`: Python functions that a recipe names
- `grid`: one recipe for each point of a grid
"""
