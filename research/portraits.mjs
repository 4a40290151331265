// Draw the portraits of the embedded data set "portraits": five styles of DiceBear, 1,200 faces each, at random.
//
//     npm install @dicebear/core@9.4.3 @dicebear/{adventurer,big-smile,personas,pixel-art,toon-head}@9.4.3 \
//         @resvg/resvg-js@2.6.2
//     node portraits.mjs portraits && python -m research.portraits portraits portraits.npz.xz

import { mkdirSync, writeFileSync } from "node:fs"
import { createAvatar } from "@dicebear/core"
import { Resvg } from "@resvg/resvg-js"

const backgroundColor = ["b6e3f4", "c0aede", "d1d4f9", "ffd5dc", "ffdfbf"]

for (const name of ["adventurer", "big-smile", "personas", "pixel-art", "toon-head"]) {
  const style = await import(`@dicebear/${name}`)
  mkdirSync(`${process.argv[2]}/${name}`, { recursive: true })
  for (let number = 0; number < 1200; number++) {
    const picture = createAvatar(style, { seed: `${name} ${number}`, size: 128, backgroundColor }).toString()
    const file = `${process.argv[2]}/${name}/${String(number).padStart(4, "0")}.png`
    writeFileSync(file, new Resvg(picture).render().asPng())
  }
}
