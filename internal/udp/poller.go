package udp

// Events says what a wire's thread waits for, or what it got.
type Events uint8

const (
	// Readable: Recv will return something.
	Readable Events = 1 << iota
	// Writable: Send will take something again after it has taken less than offered.
	Writable
)
