"""The fault test: a pool of workers, a queue of jobs, and everything that happens to both in a lab.

- `pipeline`: what is computed; `poison`: the jobs among them that do what no job should
- `options`: how much of it
- `script`, `forking`, `workers`: who works on it
- `plan`: what is to happen to them and to the server, by a seed
- `faults`, `spells`: the doing of it; `record`: what was done to whom
- `server`: the database as a bystander sees it
- `watch`: looks on meanwhile; `verdict`: what must be true in the end
- `run`: all of it, once or for as long as one likes
"""
