"""Write the generated pages: `python -m docs.reference_pages`, from the root of the repository."""

from docs.reference_pages.pages import write_all

if __name__ == "__main__":  # the hook process imports this module again
    write_all()
