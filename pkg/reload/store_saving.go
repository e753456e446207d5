package reload

import "maps"

// BeginSave begins to save a generation and the bytes of its rules. The caller runs write on any
// goroutine, and then end, whose errors are those of Save and SaveBytes. Until then the Store's
// owner may save states, lists and notes, but no generation. Such a state names the generation
// before, because write works on a copy of the Store's knowledge.
func (s *Store) BeginSave(stored Stored) (write func(), end func() (err, bytesErr error)) {
	on, remade := *s, s.remade
	on.until = maps.Clone(s.until)
	var err, bytesErr error
	write = func() {
		if err = on.Save(stored); err == nil {
			bytesErr = on.SaveBytes(stored.Generation)
		}
	}
	return write, func() (error, error) {
		s.written, s.format, s.headers, s.until = on.written, on.format, on.headers, on.until
		s.base, s.rests, s.unwritable = on.base, on.rests, on.unwritable
		s.remade += on.remade - remade
		return err, bytesErr
	}
}
