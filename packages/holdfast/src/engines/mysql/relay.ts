/** How a proxy stands between a client and a server: without TLS and compression, which the server's greeting does not offer then. */
import type { Relay } from "../../seam/protocol-reader.ts";

/** A packet that long goes on in the next one. */
const longest = 0xffffff;
const headLength = 4;

/** CLIENT_COMPRESS and CLIENT_SSL; CLIENT_ZSTD_COMPRESSION_ALGORITHM in the upper half. */
const withheld = { low: (1 << 5) | (1 << 11), high: 1 << (26 - 16) };

export const relay: Relay = {
  port: 3306,
  cutter() {
    let rest: Buffer = Buffer.alloc(0);
    return (chunk) => {
      const data = Buffer.concat([rest, chunk]);
      let end = 0;
      for (let at = 0; data.length >= at + headLength;) {
        const length = data.readUIntLE(at, 3);
        at += headLength + length;
        if (data.length >= at && length < longest) end = at;
      }
      rest = data.subarray(end);
      return data.subarray(0, end);
    };
  },
  listener() {
    let begun: Buffer | undefined = Buffer.alloc(0);
    return (chunk) => {
      if (!begun) return chunk;
      begun = Buffer.concat([begun, chunk]);
      if (begun.length < headLength || begun.length < headLength + begun.readUIntLE(0, 3))
        return Buffer.alloc(0);
      const greeting = begun;
      begun = undefined;
      // Anything else is an error: too many connections.
      if (greeting[headLength] !== 0x0a) return greeting;
      // Version, connection id, half of the scramble, a filler; between the halves of the flags character set and status.
      const low = greeting.indexOf(0, headLength + 1) + 1 + 4 + 8 + 1;
      const high = low + 2 + 3;
      greeting.writeUInt16LE(greeting.readUInt16LE(low) & ~withheld.low, low);
      greeting.writeUInt16LE(greeting.readUInt16LE(high) & ~withheld.high, high);
      return greeting;
    };
  },
};
