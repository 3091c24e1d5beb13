"""An electrophysiology pipeline with a job queue: subjects, sessions, recordings, spikes, a summary.

The recordings are synthetic and seeded by their key, so every run gives the same data. A few sessions
are bad on purpose, and fail the way sessions fail in a lab::

    Subject --> Session --> Recording --> SpikeDetection --> PopulationSummary
                                           (.Channel)

The schema is named by the environment variable ``DJJOBS_EXAMPLE_SCHEMA``. Default ``djjobs_ephys``.
"""

from __future__ import annotations

import datetime
import errno
import os
import time
from typing import Any

import datajoint as dj
import numpy as np

import djjobs

# DataJoint 2 has types of its own and warns about the native ones, which are all that 0.14 knows.
if int(dj.__version__.split(".")[0]) >= 2:
    INT, FLOAT, BLOB = "int32", "float64", "<blob>"
else:
    INT, FLOAT, BLOB = "int", "double", "longblob"

N_CHANNELS = 4
SAMPLING_RATE = 10_000  # Hz
DURATION = 3.0  # seconds
ADC_RANGE = 5.0  # volts, either way
READ_SECONDS = 0.6  # what the lab's file server takes to deliver one recording, on average
SORT_SECONDS = 0.3  # what a real spike sorter would take, and much more

schema = dj.Schema(os.environ.get("DJJOBS_EXAMPLE_SCHEMA", "djjobs_ephys"))


@schema
class Subject(dj.Manual):
    definition = """
    subject : varchar(16)
    ---
    species : varchar(32)
    """


@schema
class Session(dj.Manual):
    definition = f"""
    -> Subject
    session : {INT}
    ---
    session_date : date
    raw_file     : varchar(255)
    gain         : {INT}          # of the amplifier
    """


@schema
class Recording(djjobs.Imported):
    """Raw traces. The slow read happens outside the transaction, thanks to the three-part make."""

    definition = f"""
    -> Session
    ---
    sampling_rate : {FLOAT}       # Hz
    traces        : {BLOB}        # ADC counts, channels x samples
    """

    def make_fetch(self, key: dict[str, Any]) -> tuple[str, int]:
        raw_file, gain = (Session & key).fetch1("raw_file", "gain")
        return raw_file, int(gain)

    def make_compute(self, key: dict[str, Any], raw_file: str, gain: int) -> tuple[np.ndarray]:
        traces = read_raw(raw_file, gain)
        rail = np.iinfo(traces.dtype)
        clipped = np.mean((traces == rail.min) | (traces == rail.max))
        if clipped > 0.01:
            raise ValueError(f"amplifier saturated: {clipped:.0%} of the samples at the rail")
        return (traces,)

    def make_insert(self, key: dict[str, Any], traces: np.ndarray) -> None:
        self.insert1({**key, "sampling_rate": SAMPLING_RATE, "traces": traces})


@schema
class SpikeDetection(djjobs.Computed):
    """Spikes are the samples at which a trace falls below minus five times its noise."""

    definition = f"""
    -> Recording
    ---
    n_active : {INT}              # channels with any spikes
    """

    keep_completed = True  # the finished jobs stay in the queue with their durations

    class Channel(dj.Part):
        definition = f"""
        -> master
        channel : {INT}
        ---
        noise       : {FLOAT}     # standard deviation, ADC counts
        spike_times : {BLOB}      # seconds
        """

    def make(self, key: dict[str, Any]) -> None:
        traces, rate = (Recording & key).fetch1("traces", "sampling_rate")
        time.sleep(SORT_SECONDS)
        channels = []
        for channel, trace in enumerate(traces):
            noise, spikes = detect_spikes(trace)
            if noise == 0:
                raise ValueError(f"channel {channel} is flat: is the electrode connected?")
            channels.append({**key, "channel": channel, "noise": noise, "spike_times": spikes / rate})
        self.insert1({**key, "n_active": sum(bool(row["spike_times"].size) for row in channels)})
        self.Channel.insert(channels)


@schema
class PopulationSummary(djjobs.Computed):
    definition = f"""
    -> SpikeDetection
    ---
    mean_rate   : {FLOAT}         # spikes per second and active channel
    correlation : {FLOAT}         # of the spike counts in 50 ms bins, mean over pairs of channels
    """

    priority = 1  # a summary is quick, and somebody waits for it

    @property
    def key_source(self) -> Any:
        return SpikeDetection & "n_active >= 2"  # a correlation takes two

    def make(self, key: dict[str, Any]) -> None:
        trains = [row["spike_times"] for row in SpikeDetection.Channel & key if row["spike_times"].size]
        bins = np.arange(0, DURATION + 0.05, 0.05)
        counts = np.array([np.histogram(train, bins)[0] for train in trains])
        pairs = np.corrcoef(counts)[np.triu_indices(len(trains), k=1)]
        self.insert1({**key, "mean_rate": counts.sum(axis=1).mean() / DURATION, "correlation": pairs.mean()})


#: What there is to compute, upstream first.
TABLES = (Recording, SpikeDetection, PopulationSummary)


def insert_sessions(n_subjects: int = 6, n_sessions: int = 60) -> None:
    """Fill in the subjects and sessions. What is there already stays.

    Of every twenty sessions one was recorded with far too much gain, one lies on a disk that is not
    mounted, and one had its electrode unplugged.

    Parameters
    ----------
    n_subjects : int, optional
        How many subjects. Default 6.
    n_sessions : int, optional
        How many sessions in all, dealt out among the subjects. Default 60.
    """
    subjects = [f"mouse{number:02d}" for number in range(1, n_subjects + 1)]
    Subject.insert([{"subject": name, "species": "Mus musculus"} for name in subjects], skip_duplicates=True)
    sessions = []
    for i in range(n_sessions):
        subject, session = subjects[i % n_subjects], i // n_subjects + 1
        disk = "/data/rig2" if i % 20 == 3 else "/data/rig1"
        sessions.append(
            {
                "subject": subject,
                "session": session,
                "session_date": datetime.date(2024, 1, 8) + datetime.timedelta(days=session),
                "raw_file": f"{disk}/{subject}_{session:03d}.raw",
                "gain": {1: 1_000_000, 5: 0}.get(i % 20, 1_000),
            }
        )
    Session.insert(sessions, skip_duplicates=True)


def read_raw(raw_file: str, gain: int) -> np.ndarray:
    """Read a recording, here from a random generator instead of a disk.

    Parameters
    ----------
    raw_file : str
        Where the recording lies. Only ``/data/rig1`` is mounted.
    gain : int
        Gain of the amplifier.

    Returns
    -------
    numpy.ndarray
        ADC counts as int16, channels x samples.

    Raises
    ------
    FileNotFoundError
        The disk is not mounted.
    """
    if not raw_file.startswith("/data/rig1/"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), raw_file)
    rng = np.random.default_rng(list(raw_file.encode()))
    time.sleep(rng.uniform(0.5, 1.5) * READ_SECONDS)

    n_samples = int(DURATION * SAMPLING_RATE)
    volts = rng.normal(scale=8e-6, size=(N_CHANNELS, n_samples))
    for channel in np.flatnonzero(rng.random(N_CHANNELS) < 0.7):
        spikes = np.zeros(n_samples)
        n_spikes = rng.poisson(rng.uniform(5, 25) * DURATION)
        spikes[rng.integers(n_samples, size=n_spikes)] = rng.uniform(80e-6, 120e-6)
        volts[channel] -= np.convolve(spikes, np.hanning(16), mode="same")
    rail = np.iinfo(np.int16)
    return np.clip(volts * gain / ADC_RANGE * rail.max, rail.min, rail.max).astype(np.int16)


def detect_spikes(trace: np.ndarray) -> tuple[float, np.ndarray]:
    """Find where a trace falls below minus five times its noise.

    Parameters
    ----------
    trace : numpy.ndarray
        One channel.

    Returns
    -------
    noise : float
        Standard deviation of the noise, estimated from the median so that spikes do not count.
    spikes : numpy.ndarray
        Indices of the samples.
    """
    noise = float(np.median(np.abs(trace)) / 0.6745)
    below = trace < -5 * noise
    return noise, np.flatnonzero(below[1:] & ~below[:-1]) + 1
