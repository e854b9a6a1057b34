"""The one door through which every collective of every backend passes: c10d's own operators, seen from inside."""
