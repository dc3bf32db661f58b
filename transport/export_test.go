package transport

// Kill ends a device as the death of its process would: without a word to anybody.
func Kill(d *Device) {
	for _, p := range d.ports {
		_ = p.role.Close(func() {})
		<-p.done
	}
}

// Groups returns the number of multicast groups that the device's sockets are in.
func Groups(d *Device) int {
	d.groupMu.Lock()
	defer d.groupMu.Unlock()
	return len(d.groups)
}
