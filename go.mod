module github.com/doorbell-rdma/doorbell

go 1.26.0

require (
	github.com/gopacket/gopacket v1.7.7 // indirect
	go.uber.org/goleak v1.3.0 // indirect
	golang.org/x/net v0.62.0 // indirect
	golang.org/x/sys v0.50.0 // indirect
	pgregory.net/rapid v1.3.0 // indirect
)
