/** Whoever stands between a client and a server passes on whole statements, however the bytes arrive. */
import { expect, test } from "vitest";
import { protocol as mysql } from "../../packages/holdfast/src/engines/mysql/protocol.ts";
import { protocol as postgres } from "../../packages/holdfast/src/engines/postgres/protocol.ts";

const message = (letter: string, body: string) => {
  const head = Buffer.alloc(4);
  head.writeUInt32BE(body.length + 4);
  return Buffer.concat([Buffer.from(letter), head, Buffer.from(body)]);
};

const packet = (sequence: number, body: Uint8Array) => {
  const head = Buffer.from([0, 0, 0, sequence]);
  head.writeUIntLE(body.length, 0, 3);
  return Buffer.concat([head, body]);
};

const wholes = {
  postgres: [
    // The login, a statement, one in the extended protocol, whose parts are answered together.
    message("", "\0\u0003\0\0user\0ada\0\0"),
    message("Q", "SELECT 1\0"),
    Buffer.concat([message("P", "\0SELECT 2\0\0\0"), message("B", "\0\0"), message("S", "")]),
  ],
  mysql: [
    packet(1, Buffer.alloc(40, 7)),
    packet(0, Buffer.from("\u0003SELECT 1")),
    packet(0, Buffer.from("\u0001")),
  ],
};

test.each([
  ["postgres", postgres.relay, wholes.postgres],
  ["mysql", mysql.relay, wholes.mysql],
] as const)("%s: byte by byte, and all at once", (_, relay, whole) => {
  const cut = relay?.cutter();
  const all = Buffer.concat(whole);
  const passed = [...all].map((byte) => Buffer.from(cut?.(Uint8Array.of(byte)) ?? []));
  expect(passed.filter(({ length }) => length > 0)).toEqual(whole);
  expect(Buffer.from(relay?.cutter()(all) ?? [])).toEqual(all);
});

test("mysql: a statement that is longer than a packet is passed on as one", () => {
  const cut = mysql.relay?.cutter();
  const [first, last] = [packet(0, Buffer.alloc(0xffffff, 3)), packet(1, Buffer.from("end"))];
  expect(cut?.(first)).toHaveLength(0);
  expect(cut?.(last)).toHaveLength(first.length + last.length);
});

test("mysql: what a proxy has not is not offered, and all else is as it was", () => {
  const greeting = (flags: number) => {
    const body = Buffer.from(`\u000a9.1.0\0${"i".repeat(4)}${"s".repeat(8)}\0llcssuuand more\0`);
    body.writeUInt16LE(flags & 0xffff, 20);
    body.writeUInt16LE(flags >>> 16, 25);
    return packet(0, body);
  };
  const [tls, zlib, zstd] = [1 << 11, 1 << 5, 1 << 26];
  const others = 0xffffffff & ~(tls | zlib | zstd);
  const hear = mysql.relay?.listener?.();
  const said = Buffer.concat([greeting(0xffffffff), Buffer.from("the rest")]);
  const heard = [...said].map((byte) => Buffer.from(hear?.(Uint8Array.of(byte)) ?? []));
  expect(Buffer.concat(heard)).toEqual(Buffer.concat([greeting(others), Buffer.from("the rest")]));
});
