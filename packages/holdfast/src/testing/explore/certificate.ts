/** A certificate for this machine, signed by itself: node:crypto makes keys, and none of these. */
import { type KeyObject, generateKeyPairSync, randomBytes, sign } from "node:crypto";

/** DER, https://www.itu.int/rec/T-REC-X.690: what it is, how long, and of what. */
function der(tag: number, ...parts: readonly Uint8Array[]): Buffer {
  const body = Buffer.concat(parts);
  const { length } = body;
  const size =
    length < 0x80 ? [length] : length < 0x100 ? [0x81, length] : [0x82, length >> 8, length & 0xff];
  return Buffer.concat([Buffer.from([tag, ...size]), body]);
}

const sequence = (...parts: readonly Uint8Array[]) => der(0x30, ...parts);
const oid = (...bytes: readonly number[]) => der(0x06, Buffer.from(bytes));
const explicit = (n: number, ...parts: readonly Uint8Array[]) => der(0xa0 + n, ...parts);

const ecdsaWithSha256 = sequence(oid(0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02));
const commonName = oid(0x55, 0x04, 0x03);
const alternativeName = oid(0x55, 0x1d, 0x11);
const dayMs = 86_400_000;

/** Without dashes and the like, up to the second. */
const utc = (at: Date) =>
  der(
    0x17,
    Buffer.from(
      `${at
        .toISOString()
        .replaceAll(/[-:T]|\..*$/g, "")
        .slice(2)}Z`,
    ),
  );

/** For `names`, from yesterday on, for a year. */
export function selfSigned(names: readonly string[], now = Date.now()): { key: string; cert: string } {
  const { privateKey, publicKey } = generateKeyPairSync("ec", { namedCurve: "P-256" });
  const name = sequence(der(0x31, sequence(commonName, der(0x0c, Buffer.from("holdfast explore")))));
  const others = names.map((each) =>
    /^\d+\.\d+\.\d+\.\d+$/.test(each)
      ? der(0x87, Buffer.from(each.split(".").map(Number)))
      : der(0x82, Buffer.from(each)),
  );
  const serial = randomBytes(16);
  // Positive, and without a zero before it.
  serial[0] = ((serial[0] as number) & 0x3f) | 0x40;
  const body = sequence(
    explicit(0, der(0x02, Buffer.from([2]))),
    der(0x02, serial),
    ecdsaWithSha256,
    name,
    sequence(utc(new Date(now - dayMs)), utc(new Date(now + 365 * dayMs))),
    name,
    publicKey.export({ type: "spki", format: "der" }),
    explicit(3, sequence(sequence(alternativeName, der(0x04, sequence(...others))))),
  );
  const signature = der(0x03, Buffer.from([0]), signed(body, privateKey));
  const whole = sequence(body, ecdsaWithSha256, signature).toString("base64");
  return {
    key: String(privateKey.export({ type: "pkcs8", format: "pem" })),
    cert: `-----BEGIN CERTIFICATE-----\n${whole.replaceAll(/.{64}(?=.)/g, "$&\n")}\n-----END CERTIFICATE-----\n`,
  };
}

const signed = (body: Uint8Array, key: KeyObject) => sign("sha256", body, key);
