module github.com/doorbell-rdma/doorbell

go 1.26
