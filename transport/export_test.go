package transport

// Kill ends a device as the death of its process would: without a word to anybody.
func Kill(d *Device) {
	for _, p := range d.ports {
		_ = p.role.Close(func() {})
		<-p.done
	}
}
