/** Packets and values of the protocol, https://mariadb.com/docs/server/reference/clientserver-protocol */

export interface Packet {
  /** Counts the packets of one command and its answer: 0 is the first one of a command. */
  readonly sequence: number;
  readonly body: Buffer;
}

/** A payload of this length goes on in the next packet. */
const full = 0xffffff;

/** Cuts a stream into packets; what is not complete yet is kept. */
export class Packets {
  #parts: Buffer[] = [];
  #length = 0;
  #needed = 4;
  /** Payloads of packets that the next one goes on with. */
  #begun: Buffer[] = [];
  #sequence = 0;

  *of(chunk: Uint8Array): Generator<Packet> {
    this.#parts.push(Buffer.from(chunk));
    this.#length += chunk.length;
    while (this.#length >= this.#needed) {
      const data = this.#joined();
      const length = data.readUIntLE(0, 3);
      this.#needed = 4 + length;
      if (data.length < this.#needed) continue;
      if (this.#begun.length === 0) this.#sequence = data.readUInt8(3);
      this.#begun.push(data.subarray(4, this.#needed));
      this.#parts = [data.subarray(this.#needed)];
      this.#length = data.length - this.#needed;
      this.#needed = 4;
      if (length === full) continue;
      const body = this.#begun.length === 1 ? (this.#begun[0] as Buffer) : Buffer.concat(this.#begun);
      this.#begun = [];
      yield { sequence: this.#sequence, body };
    }
  }

  #joined(): Buffer {
    const data = this.#parts.length === 1 ? (this.#parts[0] as Buffer) : Buffer.concat(this.#parts);
    this.#parts = [data];
    return data;
  }

  /** What is known of a packet whose end has not come. */
  get unfinished(): { readonly sequence: number; readonly first: number | undefined } | undefined {
    if (this.#begun.length > 0) return { sequence: this.#sequence, first: this.#begun[0]?.[0] };
    if (this.#length < 4) return undefined;
    const data = this.#joined();
    return { sequence: data.readUInt8(3), first: data[4] };
  }
}

/** Reads a payload from front to back. Throws a RangeError past its end. */
export class Cursor {
  readonly #body: Buffer;
  #at: number;

  constructor(body: Buffer, at = 0) {
    this.#body = body;
    this.#at = at;
  }

  get left(): number {
    return this.#body.length - this.#at;
  }

  int(size: 1 | 2 | 3 | 4): number {
    const value = this.#body.readUIntLE(this.#at, size);
    this.#at += size;
    return value;
  }

  bytes(length: number): Buffer {
    if (length > this.left) throw new RangeError("past the end of a packet");
    this.#at += length;
    return this.#body.subarray(this.#at - length, this.#at);
  }

  rest(): Buffer {
    return this.bytes(this.left);
  }

  /** An integer that says its own length; undefined stands for NULL. */
  length(): number | undefined {
    const first = this.int(1);
    if (first === 0xfb) return undefined;
    if (first === 0xfc) return this.int(2);
    if (first === 0xfd) return this.int(3);
    return first === 0xfe ? Number(this.bytes(8).readBigUInt64LE()) : first;
  }

  string(): Buffer | undefined {
    const length = this.length();
    return length === undefined ? undefined : this.bytes(length);
  }
}

/** As people read it; what is no text in hexadecimal. */
export function shown(bytes: Buffer): string {
  const text = bytes.toString("utf8");
  return text.includes("\uFFFD") || text.includes("\0") ? `0x${bytes.toString("hex")}` : text;
}

/** The type of a column or a parameter. */
export interface Type {
  readonly code: number;
  readonly unsigned: boolean;
}

/** The last twelve bytes are fixed; what stands before them depends on what client and server have agreed on. */
export function typeOf(definition: Buffer): Type {
  const fixed = new Cursor(definition, definition.length - 6);
  return { code: fixed.int(1), unsigned: (fixed.int(2) & 0x20) !== 0 };
}

export interface Value {
  readonly text: string;
  /** Written without quotes. */
  readonly plain: boolean;
}

/** A value in the format of prepared statements. */
export function valueOf(cursor: Cursor, { code, unsigned }: Type): Value {
  const plain = numberOf(cursor, code, unsigned);
  if (plain !== undefined) return { text: plain, plain: true };
  if (code === 0x07 || code === 0x0a || code === 0x0c) return { text: dateOf(cursor), plain: false };
  if (code === 0x0b) return { text: timeOf(cursor), plain: false };
  const bytes = cursor.string();
  if (!bytes) return { text: "NULL", plain: true };
  const text = shown(bytes);
  // DECIMAL comes as text.
  return { text, plain: code === 0x00 || code === 0xf6 || text !== bytes.toString("utf8") };
}

function numberOf(cursor: Cursor, code: number, unsigned: boolean): string | undefined {
  if (code === 0x06) return "NULL";
  if (code === 0x04) return String(cursor.bytes(4).readFloatLE());
  if (code === 0x05) return String(cursor.bytes(8).readDoubleLE());
  if (code === 0x08) {
    const bytes = cursor.bytes(8);
    return String(unsigned ? bytes.readBigUInt64LE() : bytes.readBigInt64LE());
  }
  const size = integers.get(code);
  if (size === undefined) return undefined;
  const bytes = cursor.bytes(size);
  return String(unsigned ? bytes.readUIntLE(0, size) : bytes.readIntLE(0, size));
}

/** TINY, SHORT, YEAR, LONG, INT24. */
const integers = new Map([
  [0x01, 1],
  [0x02, 2],
  [0x0d, 2],
  [0x03, 4],
  [0x09, 4],
]);

function digits(value: number, count = 2): string {
  return String(value).padStart(count, "0");
}

/** Parts that are zero are left out, from the end. */
function dateOf(cursor: Cursor): string {
  const length = cursor.int(1);
  if (length === 0) return "0000-00-00";
  const day = `${digits(cursor.int(2), 4)}-${digits(cursor.int(1))}-${digits(cursor.int(1))}`;
  return length === 4 ? day : `${day} ${clock(cursor, cursor.int(1), length === 11)}`;
}

function timeOf(cursor: Cursor): string {
  const length = cursor.int(1);
  if (length === 0) return "00:00:00";
  const sign = cursor.int(1) === 1 ? "-" : "";
  const days = cursor.int(4);
  return sign + clock(cursor, days * 24 + cursor.int(1), length === 12);
}

function clock(cursor: Cursor, hours: number, micros: boolean): string {
  const time = `${digits(hours)}:${digits(cursor.int(1))}:${digits(cursor.int(1))}`;
  return micros ? `${time}.${digits(cursor.int(4), 6)}` : time;
}

export function textRow(body: Buffer): string[] {
  const cursor = new Cursor(body);
  const values: string[] = [];
  while (cursor.left > 0) {
    const bytes = cursor.string();
    values.push(bytes ? shown(bytes) : "NULL");
  }
  return values;
}

export function binaryRow(body: Buffer, types: readonly Type[]): string[] {
  try {
    const cursor = new Cursor(body, 1);
    // Two bits of the bitmap are kept for other uses.
    const nulls = cursor.bytes((types.length + 9) >> 3);
    return types.map((type, i) => (isSet(nulls, i + 2) ? "NULL" : valueOf(cursor, type).text));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    // Of a type that we do not know, or of columns that were described before we listened.
    return [`0x${body.toString("hex")}`];
  }
}

export function isSet(bitmap: Buffer, bit: number): boolean {
  return ((bitmap[bit >> 3] ?? 0) & (1 << (bit & 7))) !== 0;
}
