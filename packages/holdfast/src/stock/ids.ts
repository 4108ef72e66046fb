/** What changes of stock are known by: the caller's ids, and ours. */
import { randomBytes } from "node:crypto";
import { checkId } from "../input/values.ts";

/** Ids that Holdfast makes itself begin like this. No id of a caller may, or it could take the place of one of ours. */
const ownPrefixes = ["commit:", "release:", "return:", "opening:"];

export function givenOr(id: string | undefined): string {
  return id === undefined ? ownId() : id;
}

/** As it is kept: ours, if the caller named none. */
export function idOf(name: string, given: string, named: string | undefined): string {
  return named === undefined ? given : checkId("stock", name, given, ownPrefixes);
}

/** Made with the first id: workerd gives nothing random while modules are loaded. */
let ours: string | undefined;
let made = 0;
/** In the order of time, so that the index on them grows at one end. */
export function ownId(): string {
  ours ??= randomBytes(9).toString("base64url");
  return `${Date.now().toString(36)}-${ours}-${(++made).toString(36)}`;
}
