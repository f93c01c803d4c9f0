"""The verdict on a failed job: what each machine found, exchanged, judged and printed."""
