"""The file names of a run folder, and the titles of scores, for everything that reads or writes run folders."""

CONFIG = "config.yaml"
DATA = "data.json"
RUN = "run.json"
ENVIRONMENT = "environment.json"
README = "README.md"
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
ROLLBACKS = "rollbacks.json"
SCORES = "scores.jsonl"
TRACKER_ID, MLFLOW_ID = "tracker_id.txt", "mlflow_id.txt"
CHECKPOINTS, SAMPLES, IMAGES, AVERAGES, TENSORBOARD = "checkpoints", "samples", "images", "averages", "tensorboard"

VARIANT, DIVERGED = "variant.json", "diverged.json"
"""What `compare` adds: which variant a run is, and why it ended early."""

SCORE_TITLES = {
    "frechet": "Fréchet distance",
    "kernel": "kernel distance",
    "precision": "precision",
    "recall": "recall",
    "copies": "near-copies",
    "agreement": "prompt accuracy",
}
"""By the name that files and metrics use. The first one decides the order of a comparison: lower is better."""

ANCHOR_TITLES = {
    "real": "held-out real images",
    "blurred": "blurred images",
    "shuffled": "images with shuffled patches",
}
