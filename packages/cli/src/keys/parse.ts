/** Keys as people write them: parts joined by colons, or a list of parts in JSON where one holds a colon itself. */
import { type Key, key } from "holdfast";
import { describe } from "../describe.ts";
import { Failure } from "../failure.ts";
import { shown } from "../text.ts";

export function parseKey(text: string): Key {
  try {
    return key(...(partsOf(text) as [string, ...string[]]));
  } catch (error) {
    throw new Failure(
      `"${shown(text)}" is not the name of a key: ${shown(describe(error))}. It looks like image-upload:42, or like '["a:b","42"]' where a part holds a colon.`,
      { cause: error },
    );
  }
}

function partsOf(text: string): string[] {
  if (text.startsWith("[") && text.endsWith("]")) {
    try {
      const parts: unknown = JSON.parse(text);
      if (
        Array.isArray(parts) &&
        parts.every((part) => typeof part === "string" || Number.isSafeInteger(part))
      )
        return parts.map(String);
    } catch {
      // A name like any other.
    }
  }
  return text.split(":");
}

/** Every key that shows as this text: a colon may join two parts, or be in one. */
export function readings(text: string): Key[] {
  const pieces = text.split(":");
  const joints = pieces.length - 1;
  if (joints > 10) return [key(text), key(...(pieces as [string, ...string[]]))];
  const found: Key[] = [];
  for (let mask = 0; mask < 2 ** joints; mask++) {
    const parts = [pieces[0] ?? ""];
    for (const [i, piece] of pieces.slice(1).entries()) {
      if ((mask >> i) & 1) parts.push(`${parts.pop()}:${piece}`);
      else parts.push(piece);
    }
    if (!parts.includes("")) found.push(key(...(parts as [string, ...string[]])));
  }
  return found;
}

/** As it would be typed. */
export function written({ parts }: Key): string {
  const plain = parts.join(":");
  const exact = parts.some((part) => part.includes(":")) || plain.startsWith("[");
  return shown(exact ? JSON.stringify(parts) : plain);
}
