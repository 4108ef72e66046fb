/** The way from a key to one of several databases that is taken where nobody says another one. */
import { hash } from "node:crypto";
import type { Key } from "../seam/key.ts";

/** By whom or what a key is about: its second part. `key("credits", userId)` and `key("uploads", userId)` are in one place. */
export function byOwner(count: number): (key: Key) => number {
  return ({ parts: [name, owner = name] }) =>
    hash("sha256", owner as string, "buffer").readUInt32BE(0) % count;
}
