package transport

import (
	"reflect"
	"strings"
	"sync/atomic"
	"unicode"
)

// Counters returns the device's totals by name since it was opened, for reading by people
// and monitoring: wire_* for datagrams and why they were dropped, qp_* for the protocol
// (retransmissions, NAKs, deferred WQEs, publications), cm_* for connection management
// (cm_sent_req and the like by message, cm_dropped_* by reason; those that are 0 are left out),
// udp_* for the socket. It may be called at any time, by any goroutine.
func (d *Device) Counters() map[string]uint64 {
	m := make(map[string]uint64)
	for _, p := range d.ports {
		collect(m, "wire", &p.wire.Counters)
		collect(m, "qp", p.wire.QPCounters())
		p.wire.CMCounters().Each(func(name string, n uint64) {
			m["cm_"+strings.ToLower(strings.ReplaceAll(name, ".", "_"))] += n
		})
		p.collect(m)
	}
	if d.tap != nil {
		m["tap_skipped"] = d.tap.skipped.Load()
	}
	return m
}

// collect adds the atomic counters of a struct, arrays of them and nested structs included.
func collect(m map[string]uint64, prefix string, counters any) {
	v := reflect.ValueOf(counters).Elem()
	for i := range v.NumField() {
		f := v.Field(i)
		if !v.Type().Field(i).IsExported() {
			continue
		}
		name := prefix + "_" + snake(v.Type().Field(i).Name)
		switch x := f.Addr().Interface().(type) {
		case *atomic.Uint64:
			m[name] += x.Load()
		case *atomic.Int64:
			m[name] += uint64(x.Load())
		default:
			switch f.Kind() {
			case reflect.Uint64, reflect.Uint32, reflect.Uint:
				m[name] += f.Uint()
			case reflect.Int, reflect.Int64, reflect.Int32:
				m[name] += uint64(f.Int())
			case reflect.Struct:
				collect(m, name, f.Addr().Interface())
			}
		}
	}
}

// snake turns a Go name into a metric name: DropICRC becomes drop_icrc.
func snake(s string) string {
	var b strings.Builder
	rs := []rune(s)
	for i, r := range rs {
		if unicode.IsUpper(r) && i > 0 && (unicode.IsLower(rs[i-1]) || i+1 < len(rs) && unicode.IsLower(rs[i+1]) && unicode.IsUpper(rs[i-1])) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
