/** A value that was refused, for people. */
export function shown(value: unknown): string {
  let text: string;
  try {
    text = typeof value === "string" ? JSON.stringify(value) : String(value);
  } catch {
    text = `a ${typeof value}`;
  }
  return text.length > 60 ? `${text.slice(0, 57)}...` : text;
}
