# cover.awk turns the output of "go test -cover" into one line per package and fails when a
# test failed. A package without tests counts as 0% and its line ends without a newline, so
# that two packages can share a line.
/^(---|FAIL|panic:)/ { print; failed = 1; next }
{
	left = $0
	while (match(left, /github\.com[^ \t]*/)) {
		package = substr(left, RSTART, RLENGTH)
		left = substr(left, RSTART + RLENGTH)
		here = left
		sub(/github\.com.*/, "", here)
		percent = match(here, /[0-9.]+%/) ? substr(here, RSTART, RLENGTH) : "-"
		if (percent == "-" && here !~ /no (test files|statements)/) percent = "0.0%"
		printf "%7s  %s\n", percent, package
	}
}
END { exit failed }
