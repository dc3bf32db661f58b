/* Must fail: no Promela. */
active proctype p() { this is no statement }
