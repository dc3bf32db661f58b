# cover.awk turns the output of "go test -cover" into one line per package, the least
# covered first as they come, and fails when a test failed.
/^(---|FAIL|panic:)/ { print; failed = 1; next }
/coverage: [0-9.]+% of statements/ {
	match($0, /[0-9.]+%/)
	percent = substr($0, RSTART, RLENGTH)
	package = ($1 == "ok") ? $2 : $1
	printf "%7s  %s\n", percent, package
	next
}
/no test files|no statements/ { printf "%7s  %s\n", "-", ($1 == "?" || $1 == "ok") ? $2 : $1; next }
{ print }
END { exit failed }
