package private

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
)

// sumField begins the last field of a JSON object, a sum of all text before it.
const sumField = `,"sum":"`

func sumOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// Summed returns a JSON object with one more field, sum, with which SumHolds checks that the
// text is unchanged.
func Summed(object []byte) []byte {
	text := bytes.TrimSuffix(object, []byte("}"))
	return append(bytes.Clone(text), sumField+sumOf(text)+`"}`...)
}

// SumHolds reports whether a text is unchanged since Summed, or has no sum.
func SumHolds(text []byte) bool {
	i := bytes.LastIndex(text, []byte(sumField))
	return i < 0 || string(text[i:]) == sumField+sumOf(text[:i])+`"}`
}
