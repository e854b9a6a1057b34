"""What is run by hand, for minutes or hours: releases of torch, engines, real models, faults."""
