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

// HoldWires keeps a device's wires in the middle of a step until release is called.
func HoldWires(d *Device) (release func()) {
	end := make(chan struct{})
	for _, p := range d.ports {
		held := make(chan struct{})
		go func() {
			_ = p.do(func() error { close(held); <-end; return nil })
		}()
		<-held
	}
	return func() { close(end) }
}
