//go:build !linux || doorbellportable

package park

// ThreadParker is a Parker where there are no futexes; see its methods. It works on locked
// threads too, at the price of a switch of threads.
type ThreadParker struct{ Parker }
