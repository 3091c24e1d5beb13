"""The fault test: a pool of workers, a queue of jobs, and everything that happens to workers in a lab.

- `pipeline`: what is computed
- `options`: how much of it
- `script`, `forking`, `workers`: who works on it
- `faults`: what happens to them, by a seed
- `server`: the database as a bystander sees it
- `watch`: looks on meanwhile; `verdict`: what must be true in the end
- `run`: all of it, once or for as long as one likes
"""
