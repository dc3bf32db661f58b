package bench

import (
	"fmt"
	"sync"
	"testing"

	"github.com/valyala/bytebufferpool"

	"github.com/doorbell-rdma/doorbell/internal/pack"
)

// BenchmarkPack is one block of 64 KiB packed; for random data, looked at and refused.
func BenchmarkPack(b *testing.B) {
	for _, kind := range Payloads {
		for _, m := range []pack.Method{pack.S2, pack.Zstd} {
			b.Run(fmt.Sprintf("%s/%v", kind, m), func(b *testing.B) {
				src, e := Payload(kind, pack.BlockLen), pack.NewEncoder(m)
				dst := make([]byte, 0, pack.PackedLen(len(src)))
				n := len(src)
				b.SetBytes(int64(len(src)))
				b.ReportAllocs()
				for b.Loop() {
					if p, ok := e.Pack(dst, src); ok {
						n = len(p)
					}
				}
				b.ReportMetric(float64(len(src))/float64(n), "ratio")
			})
		}
	}
}

// BenchmarkUnpack is one block of 64 KiB unpacked.
func BenchmarkUnpack(b *testing.B) {
	for _, kind := range Payloads[1:] {
		for _, m := range []pack.Method{pack.S2, pack.Zstd} {
			b.Run(fmt.Sprintf("%s/%v", kind, m), func(b *testing.B) {
				src := Payload(kind, pack.BlockLen)
				p, ok := pack.NewEncoder(m).Pack(nil, src)
				if !ok {
					b.Fatal("not packed")
				}
				d := pack.NewDecoder(len(src))
				b.SetBytes(int64(len(src)))
				b.ReportAllocs()
				for b.Loop() {
					if err := d.Unpack(src, p); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkStaging compares pools for staging buffers, for blocks of one size and of several:
// bytebufferpool as package pack uses it, the same without telling it capacities, a plain
// sync.Pool, and none.
func BenchmarkStaging(b *testing.B) {
	sizes := map[string][]int{"64K": {65536}, "mixed": {1000, 65536, 300, 20000, 4096, 65536, 700, 1 << 20}}
	for _, name := range []string{"64K", "mixed"} {
		list := sizes[name]
		run := func(kind string, use func(n int)) {
			b.Run(name+"/"+kind, func(b *testing.B) {
				b.ReportAllocs()
				i := 0
				b.RunParallel(func(pb *testing.PB) {
					for i := i; pb.Next(); i++ {
						use(list[i%len(list)])
					}
				})
			})
		}
		var stage pack.Staging
		run("bytebufferpool", func(n int) {
			buf := stage.Get(pack.PackedLen(n))
			buf.B = append(buf.B, byte(n))
			stage.Put(buf)
		})
		var untold bytebufferpool.Pool
		run("bytebufferpool-untold", func(n int) {
			buf := untold.Get()
			if want := pack.PackedLen(n); cap(buf.B) < want {
				buf.B = make([]byte, 0, want)
			}
			buf.B = append(buf.B, byte(n))
			untold.Put(buf)
		})
		var plain sync.Pool
		run("sync.Pool", func(n int) {
			buf, _ := plain.Get().(*[]byte)
			if buf == nil {
				buf = new([]byte)
			}
			if want := pack.PackedLen(n); cap(*buf) < want {
				*buf = make([]byte, 0, want)
			}
			*buf = append((*buf)[:0], byte(n))
			plain.Put(buf)
		})
		run("make", func(n int) {
			buf := make([]byte, 0, pack.PackedLen(n))
			sink = append(buf, byte(n))[0]
		})
	}
}

var sink byte
